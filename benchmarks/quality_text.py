"""The text on which `benchmarks.quality` measures: prose, instructions, talk and code, written for it."""

from __future__ import annotations

TEXT = """\
The ferry left the island at six in the morning, as it had done every day since the harbour wall was rebuilt.
Most of the passengers were schoolchildren, who slept on one another's shoulders, and a few fishermen's wives
with baskets of eggs and cheese for the market on the mainland. Old Teodor, who had sold the tickets for
thirty years, knew all of them by name and no longer asked where they were going. He asked instead about their
mothers, their knees, their goats and their examinations, and he remembered the answers.

On the second Monday of March a stranger came aboard. She carried a long wooden case with brass corners, the
kind in which surveyors keep their instruments, and she paid with a large note for which Teodor had no change.
"You can pay on the way back," he said. "Everybody comes back." The woman laughed, but she wrote her name on a
slip of paper and gave it to him as a kind of promise: Ilse Marant, cartographer. It was the first time in
thirty years that a passenger had left him a debt in writing.

A map, she explained when the boat had passed the lighthouse, is never finished. The coast moves. Sand goes
from one bay to the next, cliffs fall in winter, rivers change their minds. What people call an error on an
old map is often only the truth of another year. Her task was to measure the whole shore again, all four
hundred kilometres of it, and to compare the result with the survey that had been made when her grandmother
was a child. Where the two agreed, nothing needed to be said. Where they did not, somebody had to find out
whether the land had moved or the first surveyor had been drunk.

"And if he was drunk?" asked Teodor.

"Then I shall be grateful to him," she said. "A careful man would have left me nothing to do."

How to make bread without a machine

You need five hundred grams of flour, three hundred and fifty grams of water, ten grams of salt and five grams
of dry yeast. Mix the flour with the yeast, then add the water and stir until no dry flour is left. Wait for
twenty minutes before you add the salt; the dough will be much easier to handle. Fold it four times in the
first two hours, once every thirty minutes: take one edge, pull it up gently, and lay it over the middle, then
turn the bowl by a quarter and do the same again. When the dough has doubled in size, shape it into a ball,
put it into a basket and leave it in the refrigerator overnight. The next morning, heat the oven as far as it
will go, with an iron pot inside. Bake the bread in the closed pot for twenty-five minutes, then for another
twenty minutes without the lid, until the crust is dark brown. Let it cool for at least an hour. Bread that is
cut while it is hot becomes sticky, and no knife can help it.

If the bread is flat, the dough was too wet or had waited too long. If it is dense, it had not waited long
enough. If it tastes of nothing, you forgot the salt, which happens to everyone exactly once.

Why the sky is blue and the sunset red

Sunlight contains all colours. When it passes through the air, it meets molecules that are far smaller than
the length of its waves, and a little of it is scattered in every direction. The shorter the wave, the more of
it is scattered: the strength grows with the fourth power of the frequency, so that blue light, whose waves
are about two thirds as long as those of red light, is scattered roughly five times as much. Whoever looks at
the sky, away from the sun, sees this scattered light, and it is mostly blue. In the evening the light has to
cross a much longer stretch of air before it reaches the eye. On its way it has lost nearly all its blue, and
what remains is orange and red. On the Moon, where there is no air, the sky is black even at noon.

One might object that violet light has even shorter waves, so that the sky should be violet. There are two
answers. The sun sends out less violet than blue, and the human eye is less sensitive to it. Both together are
enough to make the difference.

A conversation in a repair shop

"It makes a noise," said the customer.

"What kind of noise?"

"A kind of clicking, but only when I turn left, and only when it is cold."

The mechanic wiped her hands and walked once around the car. "How old is it?"

"Eleven years. My brother bought it new, then he moved to Lisbon and sold it to me."

"Then it is probably the joint at the end of the axle. There is a rubber boot around it that keeps the grease
inside. When the rubber gets old it tears, the grease comes out, sand gets in, and after some weeks it begins
to click. If you wait until it clicks when you drive straight ahead, it will cost you three times as much."

"And if I only turn right?"

"Then you will need a longer way home," she said, and wrote down the price.

A function that merges two sorted lists

def merge(left, right):
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result

The loop runs as long as both lists have elements left. In each round the smaller of the two first elements is
taken; where they are equal the one on the left goes first, so that the order of equal elements is kept. At
the end one of the lists is empty and the rest of the other one is appended. The number of comparisons is at
most the sum of both lengths minus one. Merge sort uses this function: it cuts a list into two halves, sorts
each of them in the same way, and merges the results. Because a list of n elements can be halved only about
log n times, and every level of halving costs n steps, the whole takes a time proportional to n log n.

The history of a bridge

The first bridge over the river was built of wood and lasted nine years. A flood in the spring of 1784 carried
it away, together with two mills and the cow of a widow, who was paid for it by the town after a long dispute.
The second bridge stood on piles of oak, and it burned down when a wagon of hay caught fire at night. The
third was built of stone. Its architect had studied in Paris and wanted three arches, but the council would
pay for only two, so that the pillar had to stand in the deepest part of the river. For six summers, divers
laid stones under a wooden bell filled with air. Four men died. When the bridge was opened in 1811, the mayor
spoke for two hours about the future of trade, and then it began to rain and everybody went home.

It is still there. In the last war, soldiers drilled holes into the pillar and filled them with explosives,
but the officer who was to give the order had grown up in the town, and he gave another order instead. Today
the bridge carries eleven thousand cars a day, and engineers come from other countries to find out why it does
not sink. The answer is under the water: the oak of the second bridge, hard as iron after two centuries, on
which the stone pillar rests without anyone having planned it.

Letters of a bookkeeper

Dear Madam, I have received your letter of the fourth and thank you for your patience. You are right that the
invoice mentions twelve chairs, although only ten were delivered. The other two are standing in our workshop,
because the varnish did not dry in the damp weather. You may either wait until next week or receive a credit
of one sixth of the total, which is eighty-four crowns. I should add that the chairs are very beautiful, and
that our apprentice, who has been sitting on one of them at lunch, would be sorry to see them go.
"""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "Dear Sir or Madam, I am writing to",
    "To make a cup of tea, first",
    "The difference between a virus and a bacterium is",
    "In 1969, astronauts",
    "Q: What is 17 plus 25?\nA:",
    "Here is a list of five fruits:\n1.",
    "The most important invention of the nineteenth century was",
    "Photosynthesis is the process by which",
    "SELECT name, age FROM users WHERE",
    "My favourite season is autumn, because",
    "Water boils at",
    "A good teacher should",
)
