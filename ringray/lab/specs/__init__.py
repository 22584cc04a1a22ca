"""Specs: checked YAML files.

model          a spec: read, checked, named by its digest
sections       its sections and their fields
fields         kinds of fields: bounds, choices, units, sweeps
domain_fields  blocks, transports, windows and documents
explain        errors with line, field and nearest name
yaml_source    YAML with line numbers
"""
