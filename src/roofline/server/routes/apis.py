"""The APIs beside OpenAI's: their routers, and how each writes its errors."""

from roofline.server.errors import ErrorForms, error_body
from roofline.server.routes import explain, relevance, sagemaker, tokens
from roofline.server.routes.anthropic import errors as anthropic_form
from roofline.server.routes.anthropic import messages as anthropic
from roofline.server.routes.ollama import api as ollama
from roofline.server.routes.ollama import embed as ollama_embed
from roofline.server.routes.ollama import form as ollama_form
from roofline.server.routes.responses import api as responses
from roofline.server.routes.tgi import api as tgi
from roofline.server.routes.tgi import form as tgi_form
from roofline.server.routes.triton import api as triton
from roofline.server.routes.triton import form as triton_form

ROUTERS = (
    *(responses.router, tokens.router, explain.router, relevance.router),
    *(anthropic.router, ollama.router, ollama_embed.router, tgi.router, triton.router, sagemaker.router),
)
ERROR_FORMS: ErrorForms = {
    "/v1/messages": anthropic_form.error_body,
    "/v1/messages/*": anthropic_form.error_body,
    "/api/*": ollama_form.error_body,
    "/generate": tgi_form.error_body,
    "/generate_stream": tgi_form.error_body,
    "/info": tgi_form.error_body,
    "/v2/rerank": error_body,  # Cohere's path, among Triton's
    "/v2": triton_form.error_body,
    "/v2/*": triton_form.error_body,
}
