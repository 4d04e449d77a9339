# Where the stub finds tools; the tests write their own environment's folder first.
"/usr/local/bin:/usr/bin:/bin"
