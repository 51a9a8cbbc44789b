"""The grammar compiler: a process that forks a child for each constraint."""
