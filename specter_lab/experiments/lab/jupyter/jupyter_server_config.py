"""What `make lab` starts JupyterLab with; everything can be overridden: make lab ARGS="--port 9000 --no-browser".

The token stays: whoever else is logged in on this machine could run code as you. You are not asked for it: the browser is
opened with it, the terminal shows the address that has it, and a browser that was let in once is let in again.
"""

import os
from pathlib import Path

import zmq

c = get_config()  # noqa: F821, given by Jupyter
c.ServerApp.root_dir = str(Path(__file__).resolve().parents[4])  # the project: notebooks show figures of artifacts/
c.ServerApp.default_url = c.LabApp.default_url = "/lab/tree/notebooks/00-start-here.ipynb"
c.Application.log_level = "WARN"  # the address is shown at any level
c.ServerApp.allow_root = os.geteuid() == 0  # in a container there is nobody else to be
c.KernelManager.transport_encryption = "auto" if zmq.has("curve") else "disabled"  # kernels listen on a port
