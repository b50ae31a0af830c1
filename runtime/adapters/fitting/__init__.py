"""An adapter against a manifest: which tensor goes to which binding."""
