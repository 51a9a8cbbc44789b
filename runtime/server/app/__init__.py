"""The application and its process: routers, middleware, connections, start-up and drain."""
