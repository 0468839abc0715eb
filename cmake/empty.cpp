// A shared library wants one source of its own; everything else comes from jali_core.
