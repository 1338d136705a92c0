"""What keeps one kernel from using up the machine: groups of the system, watchdogs, their words."""
