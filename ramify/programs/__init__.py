"""The HTTP route of programs. It uses both `lang` and the server, so it is in a layer above both."""
