"""The teaching machinery, importable in every notebook. Importing it is cheap, and never imports nbgrader."""

from grading.card import card as card
from grading.prediction import compare as compare
from grading.prediction import predict as predict
from grading.prediction import reveal as reveal
from grading.progress import progress as progress
from grading.quiz import quiz as quiz
from grading.review import review as review
from grading.submit import submit as submit
