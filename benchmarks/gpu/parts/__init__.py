"""What is run: one module a part, each with ``cases(given)``, their names, and ``run(case, given)``."""
