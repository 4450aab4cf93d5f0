"""The server: OpenAI's API over the tree, contexts over HTTP, and a page to watch it on.

worker       EngineWorker: the engine on a thread of its own, and how an event loop talks with it
answer       Answer: what an event loop sees of a request
config       ServerConfig: what a server is told
service      Service: what all routes stand on
keys         who may call
failures     what becomes of errors
record       Record: what is known of a request over HTTP, and its id
observed     Observed: who looks on: the rest of this list
metrics      GET /metrics
access_log   a line for each request
stats_log    a line on the engine every few seconds
logs         where these lines go
tracing      OpenTelemetry's spans; imported only if asked for
kv_events    what is cached, published over ZMQ; imported only if asked for
kv_wire      the form in which it is
address      where it listens
limits       bodies that are too large
openai/      OpenAI's API
health       whether the server lives, and takes requests
contexts     contexts over HTTP: open, grow, branch and join them
tree         the tree as JSON
page         the tree, the pool and the requests, live, at ``/``
app          create_app: the application, of these routers
run          a process that serves it, until it is told to stop
"""
