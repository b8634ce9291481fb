"""Tensors and objects as bytes. Each question about a pickle or an archive has one function that answers it.

| question | answer |
| --- | --- |
| Which bytes stand around the data of a tensor that we write? | ``record.framed_record``, ``record.raw_record`` |
| Which tensor does a record of any writer hold, and where is its data? | ``record.parsed_record`` |
| Is this record like a known one, and what is its checksum? | ``Record.crc32_in_header``, ``record.known_record`` |
| Where are the members of an archive? | ``record.zip_members`` |
| Which value does a pickle hold, if it is data? | ``unpickler.Unpickler`` |
| What does a name in it stand for, and what may be done with it? | ``trust``, from the tables of the three ``kinds`` |
| Which object do the bytes of an item hold? | ``objects.load_object`` |
| May ``torch.load`` have them? | ``objects.check_object`` |
| Would a load refuse what was just pickled? | ``objects.refusal_of`` |

``.metadata`` is long, so ``metadata.unpickling`` tries Python's own unpickler first. It asks the same ``trust``.
"""
