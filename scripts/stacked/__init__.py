"""Several small models of one shape, trained as one: a sweep over seeds, rates and weight decays fills a GPU."""
