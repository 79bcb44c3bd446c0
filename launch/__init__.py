"""Starting the engine: command line, HTTP server, cluster placement, planning."""
