"""python -m fedstill"""

from fedstill.commands.cli import main

main()
