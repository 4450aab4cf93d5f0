"""The server: OpenAI's API over the tree, contexts over HTTP, and a page to watch it on.

worker       EngineWorker: the engine on a thread of its own, and how an event loop talks with it
answer       Answer: what an event loop sees of a request
config       ServerConfig: what a server is told
service      Service: what all routes stand on
keys         who may call
failures     what becomes of errors
health       whether the server lives, and takes requests
tree         the tree as JSON
app          create_app: the application, of these routers
"""
