#pragma once

#include <torch/library.h>

namespace recstore {

// Adds torch.classes.recstore.ServerTable.
void define_server_table(torch::Library& library);

}  // namespace recstore
