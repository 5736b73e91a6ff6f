from backstamp.testing.conformance import PluginConformance


class TestConformance(PluginConformance):
    distribution = "acme-attention"
