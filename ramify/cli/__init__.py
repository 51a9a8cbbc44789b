"""The subcommands of `ramify`, one a module: `add_arguments(parser)` and `run(options) -> exit status`."""
