"""Random conjunctions: attention calls that combine what no hand-written table combines, each repeatable from one line."""
