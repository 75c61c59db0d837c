"""Small models as the public world writes them, in five frameworks: what a clipped gradient costs on each.

* entries.py      the registry, and what turns a model of each framework into a loss of one example
* registry.py     imports the models
* convnets.py ... the models, by what they are for
* measure.py      checks and measures one model
* summary.py      tables of what was found, against targets
* command.py      `python -m benchmarks zoo`

The models are written for this benchmark, without dropout and batch normalisation: a loss of one example has neither.
"""
