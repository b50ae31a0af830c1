"""One adapter in canonical form: loaded, cast, packed, blended, sharded, saved."""
