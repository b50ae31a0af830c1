"""The page that a browser is shown: plain files, which ask the public routes alone."""
