"""The subcommands of `ramify`: a module each, with `add_arguments(parser)` and `run_command(options)`.

serve, deploy            servers: on this machine, on a Ray cluster
run, chat, calibrate     programs, conversations and labelled questions, with an engine or a server (`target`)
bench, top               load tests; a running server in the terminal
inspect, pull, quantize  models: their needs, their files and kernels, copies with quantised weights
cache, keys              files on disk; API keys
main                     the command line, which imports a command's module when it is run
flags, settings          options of a configuration dataclass: from flags, from a file and the environment
signals                  Ctrl-C and SIGTERM
"""
