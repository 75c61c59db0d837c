"""A whole run: described, calibrated, trained within its budget, recorded, stopped and resumed."""
