"""The HTTP route of programs: needs both `lang` and the server, so it lies above both."""
