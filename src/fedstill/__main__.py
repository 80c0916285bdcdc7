"""python -m fedstill"""

from fedstill.cli import main

main()
