"""An environment for TRL and for heedful: a word is to be found by tools."""


class WordGame:
    def reset(self, word="plum", **_):
        self.word, self.tries, self.is_found = word, 0, False
        return f" It has {len(word)} letters."

    def guess(self, word: str):
        """Guess the word.

        Args:
            word: The guess.
        """
        self.tries += 1
        self.is_found = self.is_found or word == self.word
        return {"right": word == self.word, "tries": self.tries}

    def hint(self, place: int) -> str:
        """Tell a letter of the word.

        Args:
            place: Which one, from 0.
        """
        return self.word[place]

    def look(self):
        """Look around."""
        return

    def get_reward(self):
        return float(self.is_found) - self.tries / 8
