"""The application and its process: routers, middleware, connections, start and drain."""
