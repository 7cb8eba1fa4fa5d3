"""The sizes of a decode loop that follow from the options of requests: others are another program."""

import dataclasses
from collections.abc import Hashable, Sequence

from jaxshare.decoding.processing import ProcessorPlaces
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.session_passes import MIN_PLACES
from jaxshare.serving.grammars.places import GrammarSizes

_NO_PROCESSORS, _NO_GRAMMARS = ProcessorPlaces(), GrammarSizes()


@dataclasses.dataclass(frozen=True)
class LoopSizes:
    """The parts of a decode state that requests need, and how large. They only grow, so that few
    programs serve all.

    Attributes:
      samplers: places for the settings of a row's sampler.
      processors: the logits processors.
      num_top_logits: logits that are kept of each distribution; 0 for none.
      processed: whether log-probabilities can be those of the chances that tokens are drawn with.
      both: whether those of the model can be kept beside these.
      vocab, texts: sizes of what samplers look back at: counts of tokens, and the texts.
      grammars: the tables of grammars, and whether the host reads others along.
    """

    samplers: SamplerPlaces = MIN_PLACES
    processors: ProcessorPlaces = _NO_PROCESSORS
    num_top_logits: int = 0
    processed: bool = False
    both: bool = False
    vocab: int = 0
    texts: int = 0
    grammars: GrammarSizes = _NO_GRAMMARS

    def grown(self, requests: Sequence[Request], model: LoadedModel) -> "LoopSizes":
        """Returns sizes for these requests, too, but for their grammars.

        Args:
          requests: of `model`.
          model: as loaded.
        """
        if not requests:
            return self
        samplers, vocab = [each.sampler for each in requests], model.config.vocab_size
        places = SamplerPlaces.of(samplers, model.generation.stop_tokens)
        logits = max(each.num_top_logprobs for each in requests)
        read = [each.max_tokens for each in requests if each.sampler.reads_tokens]
        return dataclasses.replace(
            self,
            samplers=self.samplers.grown(places),
            processors=self.processors.grown(ProcessorPlaces.of(samplers)),
            num_top_logits=self.num_top_logits
            if logits <= self.num_top_logits
            else min(bucket(logits), vocab),
            processed=self.processed or any(each.processed for each in requests),
            both=self.both or any(each.both for each in requests),
            vocab=vocab if any(each.counts_tokens for each in samplers) else self.vocab,
            texts=max(self.texts, bucket(max(read)) if read else 0),
        )

    @staticmethod
    def read_by_grown(request: Request) -> Hashable:
        """All that `grown` reads of a request: those that are equal in it grow sizes alike."""
        sampler, logprobs = request.sampler, (request.num_top_logprobs, request.processed)
        return sampler, logprobs, request.both, sampler.reads_tokens and request.max_tokens

    def joined(self, other: "LoopSizes") -> "LoopSizes":
        """Returns sizes for both."""
        return LoopSizes(
            samplers=self.samplers.grown(other.samplers),
            processors=self.processors.grown(other.processors),
            num_top_logits=max(self.num_top_logits, other.num_top_logits),
            processed=self.processed or other.processed,
            both=self.both or other.both,
            vocab=max(self.vocab, other.vocab),
            texts=max(self.texts, other.texts),
            grammars=self.grammars.joined(other.grammars),
        )
