"""Sweeps: a plan of independent tasks, engines that run it, and collecting what the tasks found.

All that workers share is a folder. A task is done once its part is in it, and every worker takes
the next task that no other one has locked, so any number of workers, machines and calls may be at
work on one sweep, and whatever is killed costs the tasks that were running.
"""
