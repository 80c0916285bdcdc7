"""What a run leaves behind: events, the folder they are written to, and reading them back."""

from fedstill.logbook.environment import environment
from fedstill.logbook.events import Event, Note, Number, Traffic
from fedstill.logbook.reader import Run, read_rows, read_run
from fedstill.logbook.rows import Matrix, Rows
from fedstill.logbook.summary import summarise, write_summary
from fedstill.logbook.writer import FolderLog, Logbook, MemoryLog, write_json

__all__ = [
    "Event",
    "FolderLog",
    "Logbook",
    "Matrix",
    "MemoryLog",
    "Note",
    "Number",
    "Rows",
    "Run",
    "Traffic",
    "environment",
    "read_rows",
    "read_run",
    "summarise",
    "write_json",
    "write_summary",
]
