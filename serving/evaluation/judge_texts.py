"""The prompt of the judge of collaboration.

The levels follow the plan of Hogwild! Inference (section 4.3 and appendix G), 1 for no
collaboration, 3 for a basic division of tasks, 6 for the best possible, in words of our own. They
grade the coordination of the workers, not the correctness of their answers.
"""
# ruff: noqa: E501 - a line break inside a paragraph would reach the judge.

LEVELS = {
    1: "None. Each worker goes its own way, as though it were alone. What the others write is "
    "neither mentioned nor used, and the same work is done more than once.",
    2: "Contact. The workers notice each other: they greet, agree, or repeat what another has "
    "said. It changes little in what they do, and most of the work is still done twice.",
    3: "Division. The work is split into parts that different workers take up. They seldom look at "
    "each other's parts on the way, notice late where parts overlap, and put little together "
    "before the end.",
    4: "Exchange. The work is split, and results go from one worker to another while they work: "
    "what one has found is used, checked or corrected by another. Some work is still done "
    "twice, or some help comes too late.",
    5: "Teamwork. The workers plan together and change the plan when something new comes up. They "
    "build on each other's ideas, find each other's mistakes soon, and hardly ever do what "
    "another is doing.",
    6: "The best there could be. No word is wasted: every step of every worker uses all that is "
    "known to any of them at that moment, and nobody could have done more for the others.",
}

TASK = """\
You judge how well the workers of a team worked together. {count} workers, {names}, solved one problem. They wrote at the same time, and what you see is what each of them wrote, one worker after the other, cut off after a while. It may break off in mid-sentence: that is not the workers' doing.

Judge their coordination alone: whether they take notice of each other, share the work out, use and carry on each other's ideas, and do not do the same thing twice. Do not judge whether they are right, how clever they are, or how well they write.

The levels are:

{levels}

If you hesitate between two levels, take the lower one.

The problem that they were given:

<problem>
{problem}
</problem>

What they wrote:

{trace}

Remember that you are the judge. Do not solve the problem yourself, and do not go on with the workers' text. Give your reasons in a few sentences, naming what in the text speaks for the level. Then end with a line of this form, the number being 1, 2, 3, 4, 5 or 6:

Level: <number>"""
