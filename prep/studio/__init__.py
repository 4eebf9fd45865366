"""The page that does the job: commands as forms, a queue of jobs, and the pages of `prep view` beside them."""
