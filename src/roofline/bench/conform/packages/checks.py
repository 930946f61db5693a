"""The checks through client packages. What a check says of itself is its promise."""

from roofline.bench.conform.checks import Check
from roofline.bench.conform.client import Server
from roofline.bench.conform.packages.anthropic import Anthropic
from roofline.bench.conform.packages.chat_completions import LiteLLM, OpenAI
from roofline.bench.conform.packages.langchain import LangChain
from roofline.bench.conform.packages.ollama import Ollama
from roofline.bench.conform.packages.round_trip import calls_tools, chats


def openai_chats(server: Server) -> str:
    """Package openai: a chat equals its stream, and the message of either can be sent back as it is."""
    return chats(OpenAI(server))


def openai_calls_tools(server: Server) -> str:
    """Package openai: a required call equals its stream, and its result is read when it is sent back."""
    return calls_tools(OpenAI(server))


def anthropic_chats(server: Server) -> str:
    """Package anthropic: a message equals its stream, and the blocks of either can be sent back as they are."""
    return chats(Anthropic(server))


def anthropic_calls_tools(server: Server) -> str:
    """Package anthropic: a required call equals its stream, and its result is read when it is sent back."""
    return calls_tools(Anthropic(server))


def anthropic_counts_prompts(server: Server) -> str:
    """Package anthropic: count_tokens says how many tokens of prompt an answer is billed."""
    return Anthropic(server).counts()


def ollama_chats(server: Server) -> str:
    """Package ollama: a chat equals its stream, and the message of either can be sent back as it is."""
    return chats(Ollama(server))


def ollama_calls_tools(server: Server) -> str:
    """Package ollama: a call equals its stream, and its result is read when it is sent back."""
    return calls_tools(Ollama(server))


def ollama_generates(server: Server) -> str:
    """Package ollama: a generation equals its stream."""
    return Ollama(server).generates()


def ollama_names_models(server: Server) -> str:
    """Package ollama: the model is listed."""
    return Ollama(server).lists()


def litellm_chats(server: Server) -> str:
    """Package litellm: a chat equals its stream, and the message of either can be sent back as it is."""
    return chats(LiteLLM(server))


def litellm_calls_tools(server: Server) -> str:
    """Package litellm: a required call equals its stream, and its result is read when it is sent back."""
    return calls_tools(LiteLLM(server))


def langchain_openai_chats(server: Server) -> str:
    """Package langchain-openai: a chat equals its stream, and the message of either can be sent back as it is."""
    return chats(LangChain(server))


def langchain_openai_calls_tools(server: Server) -> str:
    """Package langchain-openai: a required call equals its stream, and its result is read when it is sent back."""
    return calls_tools(LangChain(server))


PACKAGE_CHECKS: tuple[Check, ...] = (
    openai_chats, openai_calls_tools, anthropic_chats, anthropic_calls_tools, anthropic_counts_prompts, ollama_chats,
    ollama_calls_tools, ollama_generates, ollama_names_models, litellm_chats, litellm_calls_tools,
    langchain_openai_chats, langchain_openai_calls_tools,
)  # fmt: skip
