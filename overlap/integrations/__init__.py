"""Chains, local SGD and ZeRO in the frameworks that people already train with.

Each module needs its framework and is imported by name: ``overlap.integrations.lightning``, ``.accelerate`` and
``.transformers``. ``docs/integrations.md`` has what to type, and what is equal to the framework without us.
"""
