"""HTTP at the edge: what turns a participant into a server, and how servers call each other.

Modules: `http` (requests and answers as values), `app` (the ASGI application), `client`, `pool` and
`inprocess` (outgoing calls over sockets or without them), `deployment` (the file that names the
servers), `connection`, `launch` and `supervisor` (processes and sockets), `cookies` (sessions).
"""
