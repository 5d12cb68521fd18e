"""Tables, figures and pages about finished runs."""
