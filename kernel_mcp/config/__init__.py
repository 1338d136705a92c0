"""What the operator decides: flags, environment variables and TOML files become `Settings`."""
