"""Small models in the style of public code, in five frameworks, and what a clipped gradient costs on each.

* entries.py      the registry, and adapters that turn a model of each framework into a per-example loss
* data.py         random inputs and targets
* layers.py       parameters, layers and losses that several models share
* registry.py     imports the models
* convnets.py ... the models, grouped by purpose
* measure.py      checks and measures one model
* summary.py      tables of the results, compared with targets
* command.py      `python -m benchmarks zoo`

The models are written for this benchmark, without dropout and batch normalisation: a per-example loss has neither the
random key that dropout needs nor the other examples that batch normalisation needs.
"""
