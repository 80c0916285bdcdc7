"""For authors of methods: the contract that every method keeps, and tiny federations to play in.

    import fedstill.testing

    fedstill.testing.check(MyMethod)            # or an object: check(MyMethod(lr=0.1))

`check` plays the method in a federation of three clients in a few seconds and raises an error that
names the check and what differed. Nothing here needs pytest.
"""

from fedstill.testing.contract import CHECKS, Broken, Case, Report, check, small

__all__ = ["CHECKS", "Broken", "Case", "Report", "check", "small"]
