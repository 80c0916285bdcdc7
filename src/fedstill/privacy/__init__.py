"""What a run with a privacy budget promises: accounting and the ledger."""

from fedstill.privacy.accounting import delta_of, epsilon_of, mu_of, sigma_for
from fedstill.privacy.ledger import Ledger, calibrated, composed

__all__ = ["Ledger", "calibrated", "composed", "delta_of", "epsilon_of", "mu_of", "sigma_for"]
