"""Chains, local SGD and ZeRO in the frameworks that people already train with.

Each module needs its framework and is imported by name: ``overlap.integrations.lightning``, ``.accelerate``,
``.transformers`` and ``.torchft``. ``docs/integrations.md`` shows how to use them.
"""
