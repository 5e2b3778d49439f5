# make help lists everything. Every target that needs packages goes through the stamp of `make setup`.

TIER ?= cpu
SEED ?= 0
LOCK := requirements.lock
STAMP := .venv/.stamp
AUTOAWQ_LOCK := specter_lab/compress/autoawq.lock
RAY_LOCK := specter_lab/experiments/ray.lock
BROWSER_LOCK := tests/browser/browser.lock
TOY_DIR := artifacts/cache/toy

BOOTSTRAP := $(or $(shell command -v python3 2>/dev/null),$(shell command -v python 2>/dev/null),\
	$(error no python3 found: install Python 3.11))
SETUP = $(BOOTSTRAP) -m specter_lab.setup_env
PY := .venv/bin/python
LAB := $(PY) -m specter_lab.cli
RUN_OPTIONS = --tier $(TIER) --seed $(SEED) $(if $(FRESH),--fresh) $(if $(MODELS),--models $(MODELS)) \
	$(if $(RUNNER),--runner $(RUNNER))
LAB_PARAMETERS := MODEL QUANTIZER PROMPTS REQUESTS MAX_TOKENS DEPTH PROFILE MEMORY_GB POLICY SLOTS CONTROL
VARIABLES := TIER SEED FRESH MODELS RUNNER ARGS TOY PYTHON TORCH_INDEX
GIVEN := $(foreach name,$(filter-out -*- MAKE%,$(.VARIABLES)),$(if $(findstring command line,$(origin $(name))),$(name)))
UNKNOWN := $(filter-out $(VARIABLES) $(LAB_PARAMETERS) GPTQMODEL_%,$(GIVEN))
$(if $(UNKNOWN),$(error nothing takes $(UNKNOWN)=: there are $(VARIABLES); and for lab notebooks $(LAB_PARAMETERS)))

BROWSER = $(strip $(foreach name,chromium chromium-browser google-chrome google-chrome-stable,$(shell command -v $(name))))
APT_GET := apt-get update -qq && apt-get

export PYTHON TORCH_INDEX
export PYTHONPATH := $(CURDIR)
export PYTHONUTF8 := 1
export GPTQMODEL_CPU_WORKERS ?= 2
export GPTQMODEL_DISABLE_PACK_EXT ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup setup-autoawq setup-ray doctor test test-gpu test-browser reproduce-all record readme documents status docs \
	package verify train-zoo lab clean FORCE

help: ## this list
	@$(BOOTSTRAP) -m specter_lab.experiments.help

setup: ## install everything into .venv (2 minutes, 4 GB of disk); goes on after a kill
	@$(SETUP) --editable --lock $(LOCK)

setup-autoawq: ## install the optional second AWQ engine into .venv-autoawq
	@$(SETUP) --venv .venv-autoawq --lock $(AUTOAWQ_LOCK)

setup-ray: $(STAMP) ## add Ray to .venv, for RUNNER=ray on many machines (10 seconds, 200 MB)
	@$(SETUP) --lock $(RAY_LOCK) --stamp .stamp-ray

doctor: $(STAMP) ## what is here, how fast this machine is; writes the hardware profile "this-machine" (30 seconds)
	$(LAB) doctor

test: $(STAMP) ## the whole test suite; ARGS="-k name" for a part of it
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

test-gpu: $(STAMP) ## the tests that need a CUDA GPU
	$(PY) -m pytest -m gpu $(ARGS)

test-browser: $(STAMP) ## every notebook in JupyterLab in a real browser, installed if it can be; ARGS="-k hit-rate" for one
	@$(SETUP) --lock $(BROWSER_LOCK) --stamp .stamp-browser
	@$(if $(BROWSER),,$(APT_GET) install -y -qq --no-install-recommends chromium || { echo "test-browser: no browser here, \
	and it could not be installed: install Chromium (on Debian: sudo apt-get install chromium), then run this again" >&2; exit 1; })
	$(PY) -m pytest -m browser tests/browser $(ARGS)

reproduce-all: $(STAMP) ## every figure and table of the tier
	$(LAB) reproduce all $(RUN_OPTIONS)

record: $(STAMP) ## reproduce-all, then make the results the recorded ones and refresh README.md
	$(LAB) reproduce all $(RUN_OPTIONS)
	$(LAB) record all --tier $(TIER)
	$(LAB) table --readme
	$(PY) -m specter_lab.artifact.documents

readme: $(STAMP) ## refresh the claims table in README.md
	$(LAB) table --readme

documents: $(STAMP) ## refresh what is generated: appendices, CITATION.cff, .zenodo.json, the map in CONTRIBUTING.md
	$(PY) -m specter_lab.artifact.documents

status: $(STAMP) ## one HTML page with every claim: paper, ours, verdict, run (artifacts/status.html)
	$(PY) -m specter_lab.artifact.status

docs: $(STAMP) ## the API reference, from the docstrings (artifacts/docs/index.html, 1 minute)
	$(PY) -m specter_lab.artifact.reference

package: $(STAMP) ## one archive with everything, the same bytes for the same commit (artifacts/package)
	$(PY) -m specter_lab.artifact.package

verify: $(STAMP) ## checksums, provenance, and every verdict judged again from its rows (1 minute)
	$(PY) -m specter_lab.artifact.verify

train-zoo: $(STAMP) ## train the models of data/zoo again (needs a GPU; TOY=1: a trial anywhere)
	$(PY) -m specter_lab.models.zoo.corpus $(if $(TOY),--size toy --out $(TOY_DIR)/corpus)
	$(PY) -m specter_lab.models.zoo.tokenizer $(if $(TOY),--corpus $(TOY_DIR)/corpus --out $(TOY_DIR)/tokenizer)
	$(PY) -m specter_lab.models.zoo.train $(if $(TOY),--toy --corpus $(TOY_DIR)/corpus --tokenizer $(TOY_DIR)/tokenizer \
		--out $(TOY_DIR)/zoo)
	$(PY) -m specter_lab.models.zoo.pairs $(if $(TOY),--out $(TOY_DIR)/translation)
	$(PY) -m specter_lab.models.zoo.train_translation $(if $(TOY),--toy --pairs $(TOY_DIR)/translation --out $(TOY_DIR)/zoo)

lab: $(STAMP) ## open the notebooks in JupyterLab, at 00-start-here; ARGS="--port 9000 --no-browser"
	@JUPYTER_CONFIG_PATH="$(CURDIR)/specter_lab/experiments/lab/jupyter:$$JUPYTER_CONFIG_PATH" $(PY) -m jupyter lab $(ARGS)

clean: ## remove your results and all caches; the environments stay
	rm -rf artifacts/results artifacts/cache artifacts/docs artifacts/package artifacts/status.html .pytest_cache
	find specter_lab tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One rule for every experiment id and alias of specter_lab/experiments/registry.py.
reproduce-%: $(STAMP)
	$(LAB) reproduce $* $(RUN_OPTIONS)

record-%: $(STAMP)
	$(LAB) record $* --tier $(TIER)

# One rule for every lab notebook: make lab-your-model MODEL=path/to/checkpoint PROMPTS=mine.txt
lab-% 00-%: $(STAMP)
	$(LAB) lab $@ $(foreach name,$(LAB_PARAMETERS),$(if $($(name)),"$(name)=$($(name))")) \
		$(if $(filter-out 0,$(SEED)),seed=$(SEED))

# The script compares the stamp with the lock file itself, so it is asked every time; that takes 0.1 s.
$(STAMP): FORCE
	@$(SETUP) --editable --lock $(LOCK) --quiet
