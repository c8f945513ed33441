"""`manage.py up`: web server and worker cluster as children of one process that heals, watches and stops them.

boot      what must stand before the first child: the lock, the port, the schema, the schedules, demo data, login, token
processes the children: start, restart with backoff, stop
watch     is the cluster alive? asks canaries, and tells the supervisor when it is not
vigil     does every process run, does the web server answer? kills what hangs
canary    the task that proves it
broker    django-q2's broker with a lane for this machine's canaries
lines     the web server's lines in the log
child     the entry point of a child, whose whole family dies with its parent
"""
