"""Child processes of the node agent or hooks inside actors; never imported by the agent itself."""
