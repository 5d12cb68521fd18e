"""What noise promises: accountants, budgets, and noise on the coordinator's mean."""
