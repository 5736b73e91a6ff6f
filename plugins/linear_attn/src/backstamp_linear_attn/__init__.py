"""Linear attention of hybrid models: gated delta net and Kimi delta attention."""
