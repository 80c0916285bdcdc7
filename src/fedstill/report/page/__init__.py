"""The report as one HTML file: what it holds (`content`), and the file itself (`document`)."""
