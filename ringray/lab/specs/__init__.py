"""Specs: checked YAML files.

model          the sections of a spec
fields         kinds of fields: bounds, choices, units, sweeps
domain_fields  blocks, transports and documents
explain        errors with line, field and nearest name
yaml_source    YAML with line numbers
"""
