"""Links and routes between two members, and the bridge from native completions to futures."""
