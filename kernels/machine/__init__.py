"""This machine: torch's thread team, records in memory, copies to a device, errors."""
