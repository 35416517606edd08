"""What this learner has read, predicted, answered and built, per module and concept."""

from grading.log import record as record
