"""Storage below the pool. Found by URL: `kvdepot serve --tier disk:///path?capacity=200GiB`, in order, fastest first.

`keys` says how an entry is named, `seal` how its bytes are checked, `url` who opens a tier; `queue` drives a tier from
the depot's loop with deadlines and a breaker; each other module is one kind of storage.
"""
